"""medusa generate: the meaning of its options; texts are compared with transformers' own."""

import json

import pytest
from transformers import AutoTokenizer

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.cli import _arguments, main

PROMPT = "def f(x):\n"
NEW = 40


@pytest.fixture
def run_json(capsys, checkpoint):
    """Run the command on the tiny checkpoint and return what it printed."""

    def run(*argv, prompt=PROMPT, model=None):
        heads = str(model or checkpoint / "heads")
        argv = ["generate", "--model", heads, "--prompt", prompt, "--max-new-tokens", NEW, "--json", *argv]
        assert main([str(arg) for arg in argv]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture(scope="module")
def greedy(model_text):
    return model_text(PROMPT, NEW)


def test_temperature_0_is_greedy(run_json, greedy):
    assert run_json("--temperature", 0)["text"] == greedy


@pytest.mark.parametrize("options", [["--top-k", 1], ["--top-p", 1e-6], ["--min-p", 1]])
def test_sampling_from_one_token_is_greedy(run_json, greedy, options):
    assert run_json("--temperature", 5, *options)["text"] == greedy


@pytest.mark.parametrize(
    ("argv", "settings"),
    [
        (["--temperature", 0.7], {"temperature": 0.7}),
        (["--temperature", 1.3, "--top-k", 7, "--top-p", 0.8], {"temperature": 1.3, "top_k": 7, "top_p": 0.8}),
        (["--do-sample", "--min-p", 0.05], {"min_p": 0.05}),
    ],
)
def test_a_seed_gives_the_same_text_with_every_tree(run_json, checkpoint, greedy, argv, settings):
    """The same text as sampled by plain decoding, called from Python."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint / "base")
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with MedusaModel.from_pretrained(checkpoint / "heads", dtype="float32", tree=Tree([])) as model:
        drawn = [
            tokenizer.decode(
                model.generate(ids, max_new_tokens=NEW, do_sample=True, seed=seed, **settings).sequences[
                    0, ids.shape[1] :
                ]
            )
            for seed in (3, 4)
        ]
    assert len({*drawn, greedy}) == 3
    for tree in ("root", "cartesian:3,2", "chain:2+lookup:3"):
        assert [run_json(*argv, "--seed", seed, "--tree", tree)["text"] for seed in (3, 4)] == drawn


def test_repetition_penalty_changes_the_text(run_json, model_text, greedy):
    expected = model_text(PROMPT, NEW, repetition_penalty=1.7)
    assert expected != greedy
    assert run_json("--repetition-penalty", 1.7)["text"] == expected


def test_texts_end_after_a_stop_string(run_json, model_text, greedy):
    stops = [greedy[20:23], greedy[9:12]]
    expected = model_text(PROMPT, NEW, stop_strings=stops)
    assert len(expected) < len(greedy)
    assert run_json("--stop", stops[0], "--stop", stops[1])["text"] == expected


def test_typical_acceptance_follows_its_settings(run_json):
    """A threshold that every draft token passes accepts whole chains; greedy decoding does not."""
    lossless = run_json("--tree", "chain:3")
    loose = run_json("--tree", "chain:3", "--acceptance", "typical", "--posterior-threshold", 1e-9)
    assert lossless["tokens_per_step"] < 2 < loose["tokens_per_step"]
    assert loose["steps"] == -(-(NEW - 1) // 4)
    strict = ["--acceptance", "typical", "--posterior-threshold", 1, "--posterior-alpha", 0.999]
    assert run_json("--tree", "chain:3", *strict)["steps"] > loose["steps"]
    # Nearly a point mass: every accepted token is the likeliest.
    cold = run_json("--tree", "chain:3", "--acceptance", "typical", "--temperature", 1e-4)
    assert cold["text"] == lossless["text"]


def test_metrics_are_printed(run_json):
    out = run_json("--tree", "chain:3", "--metrics")
    metrics = out["metrics"]
    assert (metrics["prompt_tokens"], metrics["new_tokens"]) == (len(PROMPT), NEW)
    assert metrics["steps"] == out["steps"] == sum(metrics["accepted_histogram"].values())
    assert metrics["tokens_per_step"] == out["tokens_per_step"] == pytest.approx((NEW - 1) / out["steps"])
    assert metrics["tree_nodes"] == {"4": out["steps"]}
    assert "metrics" not in run_json()


# --- a message in a chat template


def test_chat_wraps_the_prompt(chat, run_json, capsys):
    expected = chat.answer([{"role": "user", "content": "hello"}], NEW)
    assert expected != chat.text(chat.write(chat.tokenizer("hello")["input_ids"], NEW))
    out = run_json("--chat", prompt="hello", model=chat.heads)
    assert out["text"] == expected
    assert out["new_tokens"] < NEW  # the template's end of turn was found
    assert main(["generate", "--chat", "--model", chat.heads, "--prompt", "hello", "--max-new-tokens", str(NEW)]) == 0
    assert capsys.readouterr().out == expected + "\n"


# --- refusals


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--top-p", "0.9"], "--top-p needs --temperature above 0 or --do-sample"),
        (["--temperature", "0", "--do-sample"], "--temperature: expected above 0 with --do-sample"),
        (["--do-sample", "--acceptance", "typical"], "--do-sample needs --acceptance lossless"),
        (["--posterior-alpha", "0.2"], "--posterior-alpha needs --acceptance typical"),
        (["--acceptance", "typical", "--repetition-penalty", "1.5"], "acceptance: expected 'lossless'"),
        (["--template", "plain"], "--template needs --chat"),
        (["--chat"], "template: expected vicuna, plain or a Jinja file"),
    ],
)
def test_conflicting_options_are_one_line_and_code_2(refused, checkpoint, argv, words):
    refused(words, "generate", "--model", checkpoint / "heads", "--prompt", "a", *argv)


@pytest.mark.parametrize(
    "argv",
    [
        ["--temperature", "-1"],
        ["--top-p", "0"],
        ["--acceptance", "lossy"],
        ["--tree", "chain:3+lookup:256"],
        ["--tree", "auto+lookup:8"],
    ],
)
def test_bad_values_end_with_code_2(capsys, argv):
    with pytest.raises(SystemExit) as end:
        main(["generate", *argv])
    assert end.value.code == 2
    assert f"argument {argv[0]}: " in capsys.readouterr().err


# --- trees


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("root", Tree([])),
        ("chain:2", Tree([[0], [0, 0]])),
        ("cartesian:2,1", Tree([[0], [1], [0, 0], [1, 0]])),
        ("chain:2+lookup:3", Tree([[0], [0, 0]], 3)),
        ("auto", "auto"),
    ],
)
def test_tree_arguments_are_parsed(text, tree):
    assert _arguments.tree(text) == tree
