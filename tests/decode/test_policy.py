"""tree="auto" in simulation: its cost if heads are useless, and its gain if they are good."""

from __future__ import annotations

import itertools
import random
import statistics
from collections import Counter
from collections.abc import Callable

import pytest
from simulation import BETTER, CPU, DEVICES, GOOD, GPU, SMALL, USELESS, Heads, Simulation, busy, commit, preempted

from medusa_decoding import Tree
from medusa_decoding.decode.adaptive.acceptance import AcceptanceModel, TreeSet
from medusa_decoding.decode.adaptive.policy import ADVANCE, SAVINGS, Adaptive
from medusa_decoding.decode.adaptive.step_times import StepTimes
from medusa_decoding.decode.policy import FixedTree


def adaptive(accuracies: Heads = GOOD, times: StepTimes | None = None, independent: bool = False) -> Adaptive:
    tree_set = TreeSet(accuracies)
    return Adaptive(tree_set, times or StepTimes("device", "model"), AcceptanceModel(tree_set), independent)


def measured(times: StepTimes, seconds: dict[int, float]) -> None:
    for nodes, value in seconds.items():
        for _ in range(5):
            times.profile(1, 1024).add(nodes, value)


def always(heads: Heads) -> Callable[[int], Heads]:
    return lambda position: heads


def over_plain(clock: float, tokens: int) -> float:
    return clock / (tokens - 1) - 1.0


# (a) Useless heads


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("accuracies", [GOOD, BETTER], ids=["good", "better"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [17, 64, 128, 256, 1024])
def test_useless_heads_cost_the_advance_and_one_percent(device, tokens, accuracies, late):
    simulation, policy = Simulation(DEVICES[device], late=late), adaptive(accuracies)
    lost, tried, written = 0.0, 0, 0
    while written < 4000:
        lost += simulation.generate(policy, [always(USELESS)], tokens) - (tokens - 1)
        tried += sum(nodes > 1 for nodes in simulation.chosen)
        written += tokens - 1
        # On the awful device a tree takes three plain steps, one more than is risked before a size is well known.
        assert lost <= (4.0 if device == "awful" else 3.0) + 0.0101 * (written + lost)
    assert tried > 4, "nothing was tried"


@pytest.mark.parametrize("cost", [5.0, 8.0])
def test_trees_that_cost_far_more_than_was_expected_are_tried_twice(cost):
    """As where layers are dequantised for more than one row: after two samples the true cost counts."""
    simulation, policy = Simulation({nodes: 1.0 if nodes == 1 else cost for nodes in CPU}), adaptive()
    simulation.generate(policy, [always(USELESS)], 128)
    assert sum(nodes > 1 for nodes in simulation.chosen) <= 2
    for _ in range(9):
        simulation.generate(policy, [always(USELESS)], 128)
        assert sum(nodes > 1 for nodes in simulation.chosen) <= 1


@pytest.mark.parametrize("device", ["gpu", "cpu"])
@pytest.mark.parametrize("tokens", [64, 128, 256])
def test_a_useless_text_after_good_ones_may_lose_a_part_of_their_gains(device, tokens):
    times = StepTimes("device", "model")
    measured(times, DEVICES[device])
    fresh, tried = Simulation(DEVICES[device]), []
    fresh.generate(adaptive(BETTER, times), [always(USELESS)], tokens)
    for seed in range(8):
        simulation, policy = Simulation(DEVICES[device], seed), adaptive(BETTER)
        gained = sum(199 - simulation.generate(policy, [always(BETTER)], 200) for _ in range(3))
        lost = simulation.generate(policy, [always(USELESS)], tokens) - (tokens - 1)
        assert lost <= SAVINGS + ADVANCE + 0.01 * tokens + 0.2
        assert lost < gained
        tried.append(sum(nodes > 1 for nodes in simulation.chosen[:64]))
    # Without earlier gains it gives up earlier.
    assert statistics.mean(tried) > sum(nodes > 1 for nodes in fresh.chosen[:64])


@pytest.mark.parametrize("device", DEVICES)
def test_timing_noise_does_not_make_useless_heads_costly(device):
    costs = []
    for seed in range(6):
        simulation, policy = Simulation(DEVICES[device], seed, noise=0.1), adaptive()
        costs.append(over_plain(simulation.generate(policy, [always(USELESS)], 512), 512))
    assert statistics.mean(costs) <= 0.03


def test_after_useless_heads_a_generation_starts_plain_and_keeps_probing():
    simulation, policy = Simulation(CPU), adaptive()
    simulation.generate(policy, [always(USELESS)], 512)
    simulation.generate(policy, [always(USELESS)], 512)
    assert sum(nodes > 1 for nodes in simulation.chosen[:20]) <= 1  # a probe may be due
    probes = [step for step, nodes in enumerate(simulation.chosen) if nodes > 1]
    assert 2 <= len(probes) <= 6
    assert min(b - a for a, b in itertools.pairwise(probes)) > 50


# (b) Good heads


def best_fixed(times: dict[int, float], heads: Heads, tokens: float) -> float:
    """Expected time, in plain steps, of the best tree of the tree set for a number of tokens."""
    return min(tokens / tree.expected_tokens(heads) * times[tree.num_nodes] for tree in TreeSet(heads).trees)


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("device", ["gpu", "cpu"])
@pytest.mark.parametrize("heads", [GOOD, BETTER], ids=["good", "better"])
def test_good_heads_are_near_the_best_fixed_tree(device, heads, late):
    first, later = [], []
    for seed in range(12):
        simulation, policy = Simulation(DEVICES[device], seed, late=late), adaptive(heads)
        clocks = [simulation.generate(policy, [always(heads)], 512) for _ in range(3)]
        best = best_fixed(DEVICES[device], heads, 511)
        first.append(clocks[0] / best - 1)
        later += [clock / best - 1 for clock in clocks[1:]]
    assert statistics.mean(first) < 0.08  # the very first generation measures the time of each size
    assert statistics.mean(later) < 0.05


def test_the_advance_is_not_spent_on_sizes_that_take_too_long():
    shares = []
    for seed in range(12):
        simulation = Simulation(SMALL, seed, noise=0.03)
        shares.append(best_fixed(SMALL, BETTER, 119) / simulation.generate(adaptive(BETTER), [always(BETTER)], 120))
    assert statistics.mean(shares) > 0.9


def test_known_times_and_good_heads_start_with_a_tree_at_once():
    times = StepTimes("device", "model")
    measured(times, GPU)
    simulation = Simulation(GPU)
    simulation.generate(adaptive(GOOD, times), [always(GOOD)], 64)
    assert simulation.chosen[0] == 32  # 2.32 tokens / 1.13, before 64 with 2.44 / 1.2
    assert Tree.optimal(GOOD, 32).expected_tokens(GOOD) / 1.13 > Tree.optimal(GOOD, 64).expected_tokens(GOOD) / 1.2


# (c) A text that changes


@pytest.mark.parametrize("device", ["gpu", "cpu"])
@pytest.mark.parametrize("heads", [GOOD, BETTER], ids=["good", "better"])
def test_on_a_changing_text_it_is_near_the_best_schedule_and_beats_every_fixed_tree(device, heads):
    times, part = DEVICES[device], 300
    useless = [[0.0005] * len(row) for row in heads]

    def text(position: int) -> Heads:
        return useless if part <= position < 2 * part else heads

    clocks = []
    for seed in range(12):
        simulation, policy = Simulation(times, seed), adaptive(heads)
        simulation.generate(policy, [always(heads)], 128)
        clocks.append(simulation.generate(policy, [text], 3 * part))
    parts = (heads, useless, heads)
    switching = sum(best_fixed(times, accuracies, part) for accuracies in parts)
    fixed = min(
        sum(part / tree.expected_tokens(accuracies) * times[tree.num_nodes] for accuracies in parts)
        for tree in TreeSet(heads).trees
    )
    assert statistics.mean(clocks) < 1.08 * switching
    assert statistics.mean(clocks) < fixed


def test_a_flat_tree_is_replaced_when_deeper_heads_improve():
    # While only the first head is right the smallest tree is best, and it tells little about the other heads.
    flat, deep = [[0.97], *[[0.0005]] * 3], [[0.97], *[[0.9]] * 3]
    simulation, policy = Simulation(CPU), adaptive(BETTER)
    simulation.generate(policy, [always(flat)], 600)
    assert Counter(simulation.chosen[-100:]).most_common(1)[0][0] == 4
    simulation.generate(policy, [always(deep)], 600)
    assert sum(nodes == 4 for nodes in simulation.chosen) < 0.6 * len(simulation.chosen)
    assert Counter(simulation.chosen[-40:])[4] <= 1  # its time may be checked


# (d) Wrong first measurements


@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_one_slow_measurement_is_recovered_from(device, which, nodes):
    times, ratios = DEVICES[device], []
    for seed in range(8):
        met: Counter[int] = Counter()

        def once(step: int, size: int, seconds: float, met: Counter[int] = met) -> float:
            met[size] += 1
            return 10 * seconds if size == nodes and met[size] == which + 1 else seconds

        simulation, policy = Simulation(times, seed, disturbed=once), adaptive(BETTER)
        simulation.generate(policy, [always(BETTER)], 256)
        ratios.append(simulation.generate(policy, [always(BETTER)], 256) / best_fixed(times, BETTER, 255) - 1)
        assert met[nodes] > which, "the slow step was never taken"
    assert statistics.mean(ratios) < 0.06


def test_a_slow_first_plain_step_does_not_make_useless_heads_costly():
    for which in (0, 1, 2):
        simulation = Simulation(
            CPU, disturbed=lambda step, nodes, seconds, which=which: seconds * (10 if step == which else 1)
        )
        assert over_plain(simulation.generate(adaptive(), [always(USELESS)], 256), 256) <= 0.03


def test_plain_steps_that_were_slow_at_first_are_timed_again():
    weak = [[0.25], [0.1], [0.1], [0.1], [0.1]]
    simulation = Simulation(CPU, disturbed=lambda step, nodes, seconds: seconds * (2 if nodes == 1 and step < 4 else 1))
    clock = simulation.generate(adaptive([[0.25, 0.05], [0.1, 0.05]]), [always(weak)], 1024)
    assert 1.25 / CPU[2] < 0.95, "the heads do not pay for what the smallest tree takes"
    assert over_plain(clock, 1024) <= 0.03


def test_no_tree_is_tried_before_a_plain_step_was_timed():
    simulation = Simulation(GPU, disturbed=lambda step, nodes, seconds: None if step < 6 else seconds)
    policy = adaptive()
    simulation.generate(policy, [always(GOOD)], 128)
    assert set(simulation.chosen[:7]) == {1}  # no plain time yet, so nothing to compare a tree with
    assert max(simulation.chosen) > 1


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_on_a_busy_machine_it_is_near_the_best_tree_and_near_plain_decoding(device, late):
    good, useless = [], []
    for seed in range(4):
        simulation, policy = Simulation(DEVICES[device], seed, late=late, disturbed=busy(seed)), adaptive(BETTER)
        clocks = [simulation.generate(policy, [always(BETTER)], 256) for _ in range(12)]
        good += [clock / best_fixed(DEVICES[device], BETTER, 255) - 1 for clock in clocks[4:]]
        simulation, policy = Simulation(DEVICES[device], seed, late=late, disturbed=busy(seed)), adaptive()
        useless += [over_plain(simulation.generate(policy, [always(USELESS)], 128), 128) for _ in range(4)]
    assert statistics.mean(good) < 0.05
    assert statistics.mean(useless) <= 0.03


@pytest.mark.parametrize(("rate", "phases"), [(0.08, 1.0), (0.08, 3.0), (0.3, 1.0)])
@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_steps_that_lose_their_core_neither_end_the_use_of_good_heads_nor_make_useless_ones_costly(
    device, rate, phases
):
    good, useless = [], []
    for seed in range(8):
        for heads, found in ((BETTER, good), (USELESS, useless)):
            noise = preempted(seed, rate, phases)
            simulation, policy = Simulation(DEVICES[device], seed, disturbed=noise), adaptive(BETTER)
            clocks = [simulation.generate(policy, [always(heads)], 128) for _ in range(12)]
            best = 127 if heads is USELESS else best_fixed(DEVICES[device], heads, 127)
            found += [best / clock for clock in clocks[2:]]
    assert statistics.mean(good) >= 0.95
    assert statistics.mean(useless) >= 0.97


# (e) Batches


@pytest.mark.parametrize("device", ["gpu", "cpu"])
@pytest.mark.parametrize("useless", [1, 3])
def test_a_batch_is_not_slowed_down_by_the_rows_that_gain_nothing(device, useless):
    rows = [always(BETTER)] * (4 - useless) + [always(USELESS)] * useless
    simulation, policy = Simulation(DEVICES[device]), adaptive(BETTER)
    for _ in range(3):
        # The batch ends with the useless rows, which trees only slow down.
        assert over_plain(simulation.generate(policy, rows, 256), 256) <= 0.03


@pytest.mark.parametrize(("device", "gain"), [("gpu", 2.2), ("cpu", 1.3)])
def test_a_batch_of_good_rows_gains(device, gain):
    rows = [always(BETTER), always(GOOD), always(BETTER), always(BETTER)]
    simulation, policy = Simulation(DEVICES[device]), adaptive(BETTER)
    simulation.generate(policy, rows, 256)
    gained = 255 / simulation.generate(policy, [always(BETTER)] * 4, 256)
    assert gained > gain


def test_trees_pay_again_once_the_useless_row_has_ended():
    policy, draws = adaptive(BETTER), random.Random(0)
    policy.begin(batch=2, rows=1024)
    used = {True: [], False: []}
    for step in range(400):
        tree, both = policy.choose(), step < 200
        new_tokens = [commit(tree, BETTER, draws)] + [1] * both
        policy.observe(tree, GPU[tree.num_nodes], new_tokens)
        used[both].append(tree.num_nodes > 1)
    assert statistics.mean(used[True]) < 0.5
    assert statistics.mean(used[False][40:]) > 0.9


# (f) Other behaviour


# A server, whose rows come and go: the tree follows their number


def bound_by_bytes(rows: int, nodes: int) -> float:
    return 1.0 + 0.003 * (rows * nodes - 1) + 0.05 * (nodes > 1)


def bound_by_arithmetic(rows: int, nodes: int) -> float:
    return 1.0 + 0.08 * (rows * nodes - 1)


@pytest.mark.parametrize("clients", [1, 4, 16])
@pytest.mark.parametrize("time_of", [bound_by_bytes, bound_by_arithmetic])
@pytest.mark.parametrize("heads", [GOOD, BETTER, USELESS], ids=["good", "better", "useless"])
def test_a_server_is_near_the_best_fixed_tree_at_any_load(heads, time_of, clients):
    rates = {
        tree.num_nodes: Simulation({}).serve(FixedTree(tree), clients, heads, time_of, 10000)
        for tree in TreeSet(GOOD).trees
    }
    policy = adaptive(independent=True)
    first, later = (Simulation({}, noise=0.03).serve(policy, clients, heads, time_of, 10000) for _ in range(2))
    assert first > 0.93 * max(rates.values())
    assert later > 0.96 * max(rates.values())


def test_trees_of_a_server_shrink_as_its_batch_fills():
    policy, sizes = adaptive(independent=True), []
    for clients in (1, 4, 16, 64):
        simulation = Simulation({})
        simulation.serve(policy, clients, GOOD, bound_by_arithmetic, 3000 * clients)
        sizes.append(statistics.mean(simulation.chosen[len(simulation.chosen) // 2 :]))
    assert sizes[0] > 3.5
    assert sizes[0] > sizes[1] > max(sizes[2:])
    assert max(sizes[2:]) < 1.1  # plain decoding but for probes


def test_the_choice_depends_only_on_observations():
    def choices() -> list[int]:
        simulation = Simulation(CPU, seed=5, noise=0.2)
        policy = adaptive()
        simulation.generate(policy, [always(BETTER)] * 2, 400)
        return simulation.chosen

    first = choices()
    assert len(set(first)) > 2
    assert choices() == first


def test_large_trees_are_reached_over_smaller_ones():
    simulation, policy = Simulation(CPU), adaptive(BETTER)
    simulation.generate(policy, [always(BETTER)], 256)
    seen = 1
    for nodes in simulation.chosen:
        assert nodes <= 16 * seen
        seen = max(seen, nodes)
    assert simulation.chosen.count(64) <= 3, "64 nodes take five plain steps here"


def test_at_most_one_step_of_an_untimed_size_is_in_flight():
    policy = adaptive()
    policy.begin(batch=1, rows=0)
    for _ in range(2):
        policy.observe(policy.choose(), 1.0, [1])
    first, second = policy.choose(), policy.choose()
    assert first.num_nodes > 1
    assert second.num_nodes == 1


def test_a_long_prefill_pays_for_more_trials():
    def tried(prefill: float) -> int:
        simulation, times = Simulation(CPU), StepTimes()
        measured(times, CPU)
        simulation.generate(adaptive(BETTER, times), [always(USELESS)], 64, prefill)
        return sum(nodes > 1 for nodes in simulation.chosen)

    assert tried(300.0) > tried(0.0)


def test_a_grown_cache_starts_from_known_step_times():
    policy, draws = adaptive(BETTER), random.Random(0)
    policy.begin(batch=1, rows=1024)
    after: list[int] = []
    for step in range(120):
        if step == 60:
            policy.grown(2048)
        tree = policy.choose()
        policy.observe(tree, GPU[tree.num_nodes] * (1.5 if step >= 60 else 1.0), [commit(tree, BETTER, draws)])
        after += [tree.num_nodes] if step >= 60 else []
    assert statistics.mean(nodes > 4 for nodes in after[:5]) > 0.5, "the sizes known before are used at once"
    grown = policy.times.profile(1, 2048).known()
    assert grown[8] / grown[1] == pytest.approx(GPU[8], rel=0.02)
    assert policy.times.profile(1, 1024).known()[1] == 1.0


@pytest.mark.parametrize("plain_steps", [0, 1, 2])
def test_a_cache_grows_to_a_size_with_few_timings(plain_steps):
    """A short generation had that cache size before. The step chosen before the growth is observed after it."""
    policy, draws = adaptive(BETTER), random.Random(0)
    policy.begin(batch=1, rows=2048)
    for _ in range(plain_steps):
        policy.observe(policy.choose(), 1.5, [1])
    policy.begin(batch=1, rows=1024)
    nodes = []
    for step in range(40):
        tree = policy.choose()
        if step == 20:
            assert tree.num_nodes > 1
            policy.grown(2048)
        policy.observe(tree, GPU[tree.num_nodes] * (1.5 if step >= 20 else 1.0), [commit(tree, BETTER, draws)])
        nodes.append(tree.num_nodes)
    assert statistics.mean(one > 4 for one in nodes[21:]) > 0.5


def test_steps_are_observed_in_the_order_they_were_chosen():
    policy = adaptive()
    policy.begin()
    with pytest.raises(ValueError, match="got Tree"):
        policy.observe(policy.trees[0], 1.0, [1])
    policy.choose()
    with pytest.raises(ValueError, match=r"expected the one chosen .*num_nodes=1.* got Tree\(num_nodes=4"):
        policy.observe(policy.trees[1], 1.0, [1])
    policy.observe(policy.trees[0], 1.0, [])
    assert policy.times.profile(1, 0).kept() == {}


def test_without_heads_there_is_nothing_to_choose():
    simulation, policy = Simulation(GPU), adaptive([])
    assert over_plain(simulation.generate(policy, [always([])], 64), 64) == 0.0
    assert policy.trees == (Tree([]),)


def test_a_model_of_another_tree_set_is_refused():
    with pytest.raises(ValueError, match="acceptance: expected a model of the given tree set"):
        Adaptive(TreeSet(GOOD), StepTimes(), AcceptanceModel(TreeSet(GOOD)))


def test_a_fixed_tree_is_used_for_every_step():
    tree = Tree.chain(3)
    policy = FixedTree(tree)
    policy.begin(1.0, batch=2, rows=64)
    policy.grown(128)
    policy.observe(tree, None, [1, 1])
    assert policy.choose() is tree
    assert policy.trees == (tree,)
