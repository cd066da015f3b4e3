"""Calibration: ranks against a walk with full logits and transformers' text; stopped runs; the file."""

import hashlib
import json
from collections import Counter

import pytest
import torch
from calibrations import with_counts

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.checkpoints.accuracies import read_accuracies
from medusa_decoding.evaluation import Prompt
from medusa_decoding.generation.request import row_seed
from medusa_decoding.tuning import collect as module
from medusa_decoding.tuning.calibration import NONE, Calibration
from medusa_decoding.tuning.collect import calibrate
from medusa_decoding.tuning.texts import Settings, Writer
from medusa_kernels import gumbel_noise

K = 3
PROMPTS = [
    Prompt(("abc", "go on"), system="say"),
    Prompt(("which is it?",)),
    Prompt(("to be continued as it stands", ), is_text=True),
    Prompt(("zz",)),
]  # fmt: skip


# --- counts and what follows from them, by hand ---


@pytest.fixture
def counted():
    """Ten positions of two heads, two ranks each."""
    return with_counts({(0, 1): 4, (0, NONE): 2, (NONE, 1): 1, (1, 0): 2, (NONE, NONE): 1}, made={"texts": 10})


def test_accuracies_and_hits_by_hand(counted):
    assert counted.positions == 10
    assert counted.hits == [[6, 8], [2, 7]]
    assert counted.accuracies == [[0.6, 0.2], [0.2, 0.5]]


def test_paths_by_hand(counted):
    # The second head's rank 1 is right at 5 positions, but after the first head's rank 0 at only 4 of them.
    assert counted.count([]) == 10
    assert counted.count([0]) == 6
    assert counted.count([0, 1]) == 4
    assert counted.count([1, 0]) == 2
    assert counted.count([1, 1]) == 0
    tree = Tree([[0], [1], [0, 1], [1, 1]])
    assert counted.shares(tree) == [0.6, 0.2, 0.4, 0.0]
    assert tree.expected_tokens(counted.accuracies) == pytest.approx(1 + 0.6 + 0.2 + 0.6 * 0.5 + 0.2 * 0.5)


@pytest.mark.parametrize(
    ("choices", "words"),
    [([[0], [0, 0], [0, 0, 0]], r"depth 3, expected at most 2"), ([[0], [2]], r"rank 2, expected below 2")],
)
def test_trees_that_were_not_counted_are_refused(counted, choices, words):
    with pytest.raises(ValueError, match=words):
        counted.shares(Tree(choices))


@pytest.mark.parametrize(
    ("ranks", "text", "words"),
    [
        (2, ((0, 2), (0, NONE)), r"expected 2 ranks below 2 .*, got \[0, 2\]"),
        (2, ((0, 1), (0, 0)), r"which they are beyond the text's end\) a position, got \[0, 0\] with 1 tokens to come"),
        (2, ((0, NONE),), "expected one of more than 2 tokens"),
        (11, ((0, 0), (0, NONE)), "ranks: expected a whole number from 1 to 10, got 11"),
    ],
)
def test_bad_texts_are_refused(ranks, text, words):
    with pytest.raises(ValueError, match=words):
        Calibration(2, ranks, [[text]])


# --- the file ---


def test_file_round_trip_and_other_readers(counted, tmp_path):
    counted.save(tmp_path / "c.json")
    assert [path.name for path in tmp_path.iterdir()] == ["c.json"]
    values = json.loads((tmp_path / "c.json").read_text())
    assert values["accuracy"]["hits"] == [[6, 8], [2, 7]]
    assert values["accuracy"]["total"] == [10, 10]
    assert Calibration.load(tmp_path / "c.json") == counted
    # What the simulator reads of it.
    assert read_accuracies(tmp_path / "c.json") == [pytest.approx([0.6, 0.2]), pytest.approx([0.2, 0.5])]


def test_only_positions_with_targets_for_all_heads_are_counted(tmp_path):
    """Two heads: a text's last position has no target for the second one, so it is used for walks but not counted."""
    texts = [
        [((0, 1), (NONE, 0), (1, NONE)), ((0, NONE),)],
        [],  # no room for a text
        [((NONE, NONE),)],
        [(), ((0, 1), (0, NONE))],  # a text of one token has nothing to rank
    ]
    found = Calibration(2, 2, texts, {"a": 1})
    assert found.paths == {(0, 1): 2, (NONE, 0): 1}
    found.save(tmp_path / "c.json")
    values = json.loads((tmp_path / "c.json").read_text())
    assert values["format"] == 2
    assert values["texts"] == [["01-01-", "0-"], [], ["--"], ["", "010-"]]
    assert Calibration.load(tmp_path / "c.json") == found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda values: values.pop("texts"), "expected made, accuracy, ranks and texts"),
        (lambda values: values["accuracy"]["hits"][0].__setitem__(0, 5), "that the texts add up to"),
        (lambda values: values.update(format=3), "format: expected 2, got 3; run `medusa calibrate` again"),
        (lambda values: values["texts"][0].__setitem__(0, "010"), "expected 2 ranks a position, got 3 in all"),
        (lambda values: values["texts"][0].__setitem__(0, "020-"), r"2 ranks below 2 .*got \[0, 2\]"),
        (lambda values: values["texts"].pop(), "that the texts add up to"),
    ],
)
def test_damaged_files_are_refused(tmp_path, change, words):
    values = Calibration(2, 2, [[((0, 1), (0, NONE))], [((1, 1), (1, NONE))]]).to_json()
    change(values)
    (tmp_path / "c.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=rf"c.json: expected a file that `medusa calibrate` wrote, .*{words}"):
        Calibration.load(tmp_path / "c.json")


# --- counting, against transformers' text and a walk over its positions ---


@torch.no_grad()
def walked(base, heads, prompt, new, temperature=1.0, seed=None):
    """Paths of ranks at each position with a target, from full logits by the heads' formula; none after the end.

    With a seed, the noise of each place of the text is added, of which the first new token has number 0.
    """
    tokens = prompt + new
    noise = torch.zeros(len(new), base.config.vocab_size)
    if seed is not None:
        key, first = torch.tensor([row_seed(seed)]), torch.zeros(1, dtype=torch.int32)
        noise = gumbel_noise(key, first, *noise.shape)[0]
    states = base.model(torch.tensor([tokens])).last_hidden_state[0]
    paths = []
    for t in range(len(prompt) - 1, len(tokens) - 2):
        path = []
        for k in range(K):
            if t + k + 2 >= len(tokens):
                path.append(NONE)
                continue
            inner = heads.w1[k, 0] @ states[t] + heads.b1[k, 0]
            logits = heads.w2[k] @ (states[t] + inner * torch.sigmoid(inner))
            logits = logits / temperature + noise[t + k + 2 - len(prompt)]
            # The rank of a token: how many have a larger logit.
            rank = int((logits > logits[tokens[t + k + 2]]).sum())
            path.append(rank if rank < 10 else NONE)
        paths.append(tuple(path))
    return tuple(paths)


def greedy(base, prompt, new_tokens, eos):
    ids = torch.tensor([prompt])
    out = base.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, eos_token_id=eos
    )
    return out[0, len(prompt) :].tolist()


def test_counts_equal_a_walk_over_the_models_own_texts(make):
    from chats import CHAT_TEMPLATE

    model, tokenizer = make(CHAT_TEMPLATE)
    heads, base = model.heads, model.base
    model.undo()
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    ranks, texts, tokens = [], 0, 0
    for prompt in PROMPTS:
        ranks.append(())
        if prompt.is_text:
            ids = tokenizer(prompt.turns[0])["input_ids"][:6]
            new = greedy(base, ids, 24, None)
            ranks[-1] += (walked(base, heads, ids, new),)
            texts, tokens = texts + 1, tokens + len(new)
            continue
        said = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
        for turn in prompt.turns:
            said.append({"role": "user", "content": turn})
            ids = tokenizer.apply_chat_template(said, add_generation_prompt=True)["input_ids"]
            new = greedy(base, ids, 24, [end])
            ranks[-1] += (walked(base, heads, ids, new),)
            texts, tokens = texts + 1, tokens + len(new)
            text = tokenizer.decode(new, skip_special_tokens=True)
            said.append({"role": "assistant", "content": text})
    with MedusaModel(base, heads) as again:
        found = calibrate(again, tokenizer, PROMPTS, max_new_tokens=24, prompt_tokens=6)
    assert found.texts == tuple(ranks)
    # The last K tokens of a text are targets only: of its positions, the last K - 1 have heads without one.
    assert found.paths == Counter(path for of_prompt in ranks for text in of_prompt for path in text[: -(K - 1)])
    assert (found.num_heads, found.ranks) == (K, 10)
    assert (found.made["texts"], found.made["tokens"], found.made["left_out"]) == (texts, tokens, 0) == (5, tokens, 0)
    # The case is not trivial: tokens inside and outside the ranks, several ranks, paths that are entirely right.
    assert any(NONE in path for path in found.paths)
    assert any(NONE not in path for path in found.paths)
    assert len({path[0] for path in found.paths}) > 3


def test_turns_without_room_in_the_context_are_skipped(make):
    model, tokenizer = make(max_position_embeddings=24)
    asked = [Prompt(("abcdefgh", "i")), Prompt(("a" * 24, "b"))]
    found = calibrate(model, tokenizer, asked, max_new_tokens=200)
    assert (found.made["texts"], found.made["tokens"], found.made["left_out"]) == (1, 16, 3)
    assert found.positions == 16 - K


def test_a_trimmed_vocabulary_bounds_the_ranks():
    """A tree must not ask for ranks that a trimmed vocabulary does not have."""
    from chats import chat_tokenizer
    from models import tiny

    from medusa_decoding import MedusaHeads

    tokenizer = chat_tokenizer([], None)
    base = tiny(vocab_size=len(tokenizer), max_position_embeddings=256)
    kept = torch.arange(0, len(tokenizer), 6)
    heads = MedusaHeads(base.config.hidden_size, len(tokenizer), K, token_map=kept)
    with torch.no_grad():
        heads.w2.copy_(base.lm_head.weight[kept].expand_as(heads.w2))
    with MedusaModel(base, heads.eval()) as model:
        found = calibrate(model, tokenizer, PROMPTS, max_new_tokens=24)
    assert found.ranks == len(kept) < 10
    assert all(len(row) == len(kept) for row in found.accuracies)


# --- sampled texts ---


def test_ranks_are_those_of_the_sampled_texts(make):
    """The texts of a calibration at a temperature, generated again with one seed per text; ranks by hand."""
    model, tokenizer = make()
    found = calibrate(model, tokenizer, PROMPTS, max_new_tokens=24, prompt_tokens=6, temperature=1.5, seed=3)
    written = []
    for number, prompt in enumerate(PROMPTS):
        written.append([])
        ids = []
        for turn, question in enumerate(prompt.turns):
            if turn:
                ids += tokenizer("\n" + question)["input_ids"]
            else:
                system = "" if prompt.system is None else prompt.system + "\n"
                ids = tokenizer(system + question)["input_ids"][: 6 if prompt.is_text else None]
            place = json.dumps([3, number, turn]).encode()
            seed = int.from_bytes(hashlib.blake2b(place, digest_size=8).digest(), "big")
            out = model.generate(
                torch.tensor([ids]), max_new_tokens=24, tree=Tree([]), do_sample=True, temperature=1.5, seed=seed
            )
            new = out.sequences[0, len(ids) :].tolist()
            written[-1].append((ids, new, 1.5, seed))
            ids = ids + new
    heads, base = model.heads, model.base
    model.undo()
    ranks = tuple(tuple(walked(base, heads, *text) for text in of_prompt) for of_prompt in written)
    assert found.texts == ranks
    without = tuple(tuple(walked(base, heads, *text[:2]) for text in of_prompt) for of_prompt in written)
    assert without != ranks, "the noise changes ranks"
    assert [len(of_prompt) for of_prompt in found.texts] == [2, 1, 1, 1]


# --- stopped runs ---


def run(make, out, resume, prompts=PROMPTS, **settings):
    model, tokenizer = make()
    return calibrate(
        model, tokenizer, prompts, out=out, resume=resume, **({"max_new_tokens": 16, "prompt_tokens": 6} | settings)
    )


@pytest.fixture(scope="module")
def finished(make, tmp_path_factory):
    """The bytes of an undisturbed run's result, and of its progress and that one's settings before they went."""
    out = tmp_path_factory.mktemp("finished") / "whole.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "remove", lambda file: None)
        run(make, out, False)
    return tuple(out.with_name(out.name + end).read_bytes() for end in ("", ".progress", ".progress.settings"))


def put_progress(out, progress, settings):
    out.with_name(out.name + ".progress").write_bytes(progress)
    out.with_name(out.name + ".progress.settings").write_bytes(settings)


def test_a_run_killed_at_any_point_resumes_to_the_same_bytes(make, tmp_path, finished, monkeypatch):
    whole, progress, settings = finished
    lines = progress.splitlines(keepends=True)
    assert len(lines) == len(PROMPTS)
    asked, answers = [], Writer.answers
    monkeypatch.setattr(Writer, "answers", lambda self, left: asked.append(left) or answers(self, left))
    starts = [sum(map(len, lines[:n])) for n in range(len(lines) + 1)]
    for done, start in enumerate(starts):
        # After a whole line, or with the first or all but the last byte of the next one.
        for torn in {0: (0, 1), 3: (0, len(lines[3]) - 1)}.get(done, (0,)):
            out = tmp_path / f"{done}-{torn}.json"
            put_progress(out, progress[: start + torn], settings)
            asked.clear()
            if start + torn:
                message = r"out: expected no records .* in .*.json.progress, .* \(--resume\)"
                with pytest.raises(ValueError, match=message):
                    run(make, out, False)
            run(make, out, True)
            assert out.read_bytes() == whole
            known = [json.loads(line)["number"] for line in lines[:done]]
            assert asked == [[(n, one) for n, one in enumerate(PROMPTS) if n not in known]]  # nothing twice
            assert [path.name for path in tmp_path.glob(f"{out.name}*")] == [out.name]


def test_a_finished_result_is_reused_only_for_the_same_run(make, tmp_path, finished, monkeypatch):
    out = tmp_path / "whole.json"
    out.write_bytes(finished[0])
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "answers", lambda *asked: pytest.fail("asked again"))
        assert run(make, out, True) == Calibration.load(out)
    with pytest.raises(
        ValueError, match=r"settings: expected .*'max_new_tokens': 16.* like the counts in .*whole.json"
    ):
        run(make, out, True, max_new_tokens=20)
    assert out.read_bytes() == finished[0]
    other = run(make, out, False, max_new_tokens=20)  # runs again and replaces the other result
    assert other.made["settings"]["max_new_tokens"] == 20
    assert Calibration.load(out) == other


def test_a_file_that_is_not_a_calibration_is_not_overwritten(make, tmp_path):
    (tmp_path / "thesis.txt").write_text("Chapter 1")
    with pytest.raises(ValueError, match=r"out: expected a new file or a calibration .*thesis"):
        run(make, tmp_path / "thesis.txt", False)
    assert (tmp_path / "thesis.txt").read_text() == "Chapter 1"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_new_tokens": 17}, "settings: expected .*'max_new_tokens': 16"),
        ({"prompts": [*PROMPTS[:3], Prompt(("zy",))]}, "prompts: expected"),
    ],
)
def test_progress_of_something_else_is_refused(make, tmp_path, finished, changes, words):
    put_progress(tmp_path / "c.json", *finished[1:])
    with pytest.raises(ValueError, match=rf"{words}.* like the records that are there .*c.json.progress"):
        run(make, tmp_path / "c.json", True, **changes)
    assert (tmp_path / "c.json.progress").read_bytes() == finished[1]


def test_another_generation_config_or_other_heads_are_another_run(make, tmp_path, finished):
    put_progress(tmp_path / "c.json", *finished[1:])
    settings = {"max_new_tokens": 16, "prompt_tokens": 6, "out": tmp_path / "c.json", "resume": True}
    model, tokenizer = make()
    model.base.generation_config.no_repeat_ngram_size = 2
    with pytest.raises(ValueError, match=r"settings: expected .*'generation': .* like the records that are there"):
        calibrate(model, tokenizer, PROMPTS, **settings)
    model, tokenizer = make()
    with torch.no_grad():
        model.heads.b1 += 0.01
    with pytest.raises(ValueError, match="heads: expected"):
        calibrate(model, tokenizer, PROMPTS, **settings)


def test_other_backends_and_templates_are_other_runs(make):
    """The other template renders questions alike and answers differently."""
    from chats import CHAT_TEMPLATE

    header = "{{ '<|start|>' + message['role'] + '\\n' }}"
    silent = (
        "{% for message in messages %}{% if message['role'] != 'assistant' %}" + header + "{% endif %}"
        "{{ message['content'] + '<|end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
    )
    described = []
    for template, backend in ((CHAT_TEMPLATE, "auto"), (silent, "auto"), (CHAT_TEMPLATE, "compiled")):
        model, tokenizer = make(template)
        model.backend = backend
        described.append(Writer(model, tokenizer, Settings()).describe([Prompt(("zz",))]))
    own, *others = described
    for other, changed in zip(others, ("template", "backend"), strict=True):
        assert {**other, "settings": own["settings"]} == own
        assert [name for name in own["settings"] if other["settings"][name] != own["settings"][name]] == [changed]


def test_a_run_without_any_text_long_enough_writes_no_file(make, tmp_path, monkeypatch):
    out = tmp_path / "c.json"
    model, tokenizer = make(max_position_embeddings=24)
    with pytest.raises(ValueError, match=r"prompts: expected a text of at least 4 new tokens .*, got 1 texts with 2"):
        calibrate(model, tokenizer, [Prompt(("a" * 22,))], max_new_tokens=16, out=out)
    assert [*tmp_path.iterdir()] == []
    monkeypatch.setattr(Writer, "answers", lambda *args: pytest.fail("worked"))
    with pytest.raises(ValueError, match=r"max_new_tokens: expected at least 4, .* got 3"):
        run(make, out, False, max_new_tokens=K)
    assert [*tmp_path.iterdir()] == []


# --- refusals ---


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: expected a whole number from 1, got 0"),
        ({"prompts": []}, "prompts: give at least one"),
        ({"temperature": -1.0}, "temperature: expected a number from 0, got -1.0"),
        ({"max_new_tokens": K}, "max_new_tokens: expected at least 4, as texts must go on .* 3 heads reach, got 3"),
    ],
)
def test_bad_arguments_are_refused(make, settings, words):
    arguments = {"resume": False, "out": None} | settings
    with pytest.raises(ValueError, match=words):
        run(make, **arguments)


def test_a_model_without_heads_is_refused(make):
    model, tokenizer = make()
    base = model.base
    model.undo()
    with MedusaModel(base) as plain, pytest.raises(ValueError, match="model: expected one with heads, got one without"):
        calibrate(plain, tokenizer, PROMPTS)
