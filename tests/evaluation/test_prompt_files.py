"""Prompts from every kind of file, and what is refused."""

import json

import pytest

from medusa_decoding.evaluation import read_prompts


def lines(path, *records):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), encoding="utf-8")
    return path


def question(number, category, *turns):
    return {"question_id": number, "category": category, "turns": list(turns)}


def test_mt_bench(tmp_path):
    path = lines(
        tmp_path / "mt_bench.jsonl",
        question(81, "writing", "Write.", "Again."),
        "",
        question(111, "math", "Add.", "Why?", "And?") | {"reference": ["4", "5"]},
    )
    first, second = read_prompts([path])
    assert (first.turns, first.category, first.where) == (("Write.", "Again."), "writing", f"{path}:1")
    assert (second.turns, second.category, second.where) == (("Add.", "Why?"), "math", f"{path}:3")
    assert [p.turns for p in read_prompts([path], turns=1)] == [("Write.",), ("Add.",)]
    assert read_prompts([path], turns=3)[1].turns == ("Add.", "Why?", "And?")
    assert not first.is_text
    assert first.system is None


def test_human_eval_and_texts(tmp_path):
    path = lines(
        tmp_path / "human_eval.jsonl",
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": "", "test": ""},
        {"text": "Once upon a time."},
        {"prompt": "Once", "text": "Once upon a time.", "category": "tales"},
    )
    (tmp_path / "tale.txt").write_text("There was.")
    code, text, begun, tale = read_prompts([path, tmp_path / "tale.txt"])
    assert (code.turns, code.category, code.is_text) == (("def f():\n",), "human_eval", False)
    assert (text.turns, text.is_text) == (("Once upon a time.",), True)
    assert (begun.turns, begun.category, begun.is_text) == (("Once",), "tales", True)
    assert (tale.turns, tale.category, tale.is_text) == (("There was.",), "tale", True)


def test_conversations_keep_what_is_asked(tmp_path):
    path = lines(
        tmp_path / "chats.jsonl",
        {
            "conversations": [
                {"from": "human", "value": "Hi"},
                {"from": "gpt", "value": "Hello"},
                {"from": "human", "value": "Bye"},
            ]
        },
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], "prompt": "x"},
    )
    chat, messages = read_prompts([path])
    assert (chat.turns, chat.system) == (("Hi", "Bye"), None)
    assert (messages.turns, messages.system) == (("Hi",), "Be brief.")


def test_gsm8k(tmp_path):
    pytest.importorskip("datasets", reason="the extra 'train' is not installed")
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "gsm8k_test.parquet"
    table = pyarrow.table({"question": ["How many?", "How much?"], "answer": ["#### 1", "#### 2"]})
    pyarrow.parquet.write_table(table, path)
    found = read_prompts([path])
    assert [(p.turns, p.category) for p in found] == [(("How many?",), "gsm8k_test"), (("How much?",), "gsm8k_test")]
    assert found[1].where == f"{path}: row 2"


def test_repeated_prompts_count_once(tmp_path, caplog):
    records = [
        question(1, "a", "Why?", "And?"),
        question(2, "b", "Why?", "And?"),
        question(3, "a", "Why?", "How?"),
        question(4, "a", "why?", "And?"),
    ]
    path = lines(tmp_path / "q.jsonl", *records)
    assert len(read_prompts([path, path])) == 8
    assert not caplog.records
    found = read_prompts([path, path], distinct=True)
    assert [one.where for one in found] == [f"{path}:1", f"{path}:3", f"{path}:4"]
    assert "5 of 8 prompts are left out, which repeat others" in caplog.text
    assert [one.where for one in read_prompts([path], distinct=True, turns=1)] == [f"{path}:1", f"{path}:4"]
    assert [one.where for one in read_prompts([path], distinct=True, limit=2)] == [f"{path}:1", f"{path}:3"]


def test_categories_and_limits(tmp_path):
    path = lines(tmp_path / "q.jsonl", *(question(n, "ab"[n % 2], f"{n}?") for n in range(6)))
    assert [p.turns[0] for p in read_prompts([path], limit=2)] == ["0?", "1?", "2?", "3?"]
    assert [p.turns[0] for p in read_prompts([path], categories=["b"])] == ["1?", "3?", "5?"]
    assert [p.turns[0] for p in read_prompts([path], categories=["b"], limit=1)] == ["1?"]
    with pytest.raises(ValueError, match=r"categories: expected some of a, b, got c"):
        read_prompts([path], categories=["a", "c"])
    for name in ("limit", "turns"):
        with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
            read_prompts([path], **{name: 0})


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"id": 3, "query": "?"}, "none of the keys turns, .*, text, but id, query"),
        ("{", "not JSON"),
        ({"turns": ["a", 5]}, "turn 2 is not text"),
        ({"prompt": "  "}, "prompt is empty"),
    ],
)
def test_unknown_records_are_named(tmp_path, record, words):
    path = lines(tmp_path / "q.jsonl", question(1, "a", "fine"), record)
    with pytest.raises(ValueError, match=f"^prompts: expected a record with a prompt in {path}:2, got: .*{words}"):
        read_prompts([path])


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"turns": ["a"], "category": 5}, "a name as category in FILE:1, got 5"),
        ({"messages": [{"role": "assistant", "content": "Hi"}]}, "FILE:1 has no turn of the user"),
    ],
)
def test_odd_categories_and_missing_questions_are_named(tmp_path, record, words):
    path = lines(tmp_path / "q.jsonl", record)
    with pytest.raises(ValueError, match="^prompts: .*" + words.replace("FILE", str(path))):
        read_prompts([path])


def test_empty_and_missing_files_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"prompts: no prompt found in .*empty.jsonl"):
        read_prompts([tmp_path / "empty.jsonl"])
    with pytest.raises(ValueError, match=r"expected a file, .* got .*missing.jsonl"):
        read_prompts([tmp_path / "missing.jsonl"])
