"""Reading data: every kind of record, all kinds of files, errors in records, and the split by prompt."""

import gzip
import json
import math
import sys
import types
from pathlib import Path

import pytest
from toy import sharegpt, write_lines

from medusa_decoding.evaluation import read_prompts
from medusa_decoding.training.config import SourceConfig
from medusa_decoding.training.data.records import Record, Report, held_out, read_records, split_records

MESSAGES = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
EXPECTED = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"})


def read(path, report=None, form="auto", **options):
    return list(read_records([SourceConfig(str(path), form)], report or Report(), **options))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz"])
def test_json_lines_of_all_three_kinds(tmp_path, name):
    path = write_lines(tmp_path / name, sharegpt("Hi", "Hello"), "", MESSAGES, {"text": "Once.", "id": 3})
    records = read(path)
    assert [record.messages for record in records] == [EXPECTED, EXPECTED, ()]
    assert records[2].text == "Once."
    # Blank lines count as lines, not as records.
    assert [record.where for record in records] == [f"{path}:1", f"{path}:3", f"{path}:4"]
    assert [record.prompt for record in records] == ["Hi", "Hi", "Once."]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_json_list_is_read(tmp_path, mark):
    path = tmp_path / "a.json"
    path.write_bytes(mark + json.dumps([sharegpt("Hi", "Hello"), 5], indent=1).encode())
    report = Report()
    assert [record.messages for record in read(path, report)] == [EXPECTED]
    assert report.examples == [(f"{path}: record 2", "expected a record with named fields, got int")]
    path.write_bytes(mark + b"[{]")
    with pytest.raises(ValueError, match=r"expected a list of records in .*a.json, got not JSON"):
        read(path)


def test_folders_and_text_files_are_read(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_text("Second\nfile.")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress("\ufeffThird.".encode()))
    (tmp_path / "notes.md").write_text("not data")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints" / "c-checkpoint.txt").write_text("Third.")
    write_lines(tmp_path / "a.jsonl", MESSAGES)
    assert [record.text for record in read(tmp_path)] == [None, "Second\nfile.", "Third."]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty has no files that end in .jsonl"):
        read(tmp_path / "empty")


def test_parquet_files_are_read(tmp_path):
    pytest.importorskip("datasets", reason="the extra 'train' is not installed")
    import pyarrow
    from pyarrow import parquet

    rows = [sharegpt("Hi", "Hello") | {"text": None}, {"conversations": None, "text": "Once."}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    records = read(tmp_path / "a.parquet")
    assert [record.messages for record in records] == [EXPECTED, ()]
    assert records[1].text == "Once."
    assert records[1].where.endswith("a.parquet: row 2")
    (tmp_path / "b.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match=r"expected a readable file, got .*b.parquet"):
        read(tmp_path / "b.parquet")


def test_parquet_and_hub_names_without_the_library_say_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(ModuleNotFoundError, match=r"a.parquet \(pip install 'medusa-kernels\[train\]'\), got none"):
        read(tmp_path / "a.parquet")
    with pytest.raises(ModuleNotFoundError, match="the library for lmsys/chat, which is no file and so a hub name"):
        read("lmsys/chat")


def test_hub_names_are_passed_to_the_library(monkeypatch):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        if args[0] == "no/such":
            raise FileNotFoundError("nothing on the hub")
        return [MESSAGES]

    monkeypatch.setitem(
        sys.modules,
        "datasets",
        types.SimpleNamespace(load_dataset=load_dataset, config=types.SimpleNamespace(HF_HUB_OFFLINE=True)),
    )
    source = SourceConfig("lmsys/chat", split="test", subset="en", revision="v1")
    (record,) = read_records([source], Report())
    assert record.messages == EXPECTED
    assert record.where == "lmsys/chat [test]: row 1"
    assert asked == [(("lmsys/chat", "en"), {"split": "test", "revision": "v1"})]
    with pytest.raises(ValueError, match=r"a file, a folder or a hub dataset, got no/such \(nothing on the hub\)"):
        read("no/such")


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet", "hub"])
def test_a_limit_reads_no_further(tmp_path, monkeypatch, kind):
    """The end of each source is damaged, and a dataset of the hub would be made whole before its first row."""
    datasets = pytest.importorskip("datasets", reason="the extra 'train' is not installed")
    import pyarrow
    from pyarrow import parquet

    rows = [{"text": f"{number} {hash(str(number))}"} for number in range(20_000)]
    name = file = tmp_path / f"a.{'parquet' if kind == 'hub' else kind}"
    if kind == "jsonl.gz":
        content = write_lines(file, *rows).read_bytes()[:-5000]
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=1000, compression="none")
        content = bytearray(file.read_bytes())
        start = parquet.ParquetFile(file).metadata.row_group(9).column(0).data_page_offset
        content[start : start + 5000] = b"\xff" * 5000
    file.write_bytes(content)
    if kind == "hub":
        load, name = datasets.load_dataset, "owner/terabytes"
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)

        def load_dataset(path, subset, revision, **options):
            assert path == name
            return load("parquet", data_files=str(file), cache_dir=str(tmp_path / "cache"), **options)

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(read(name, limit=1000)) == 1000
    with pytest.raises((ValueError, datasets.exceptions.DatasetGenerationError)):
        read(name)


@pytest.mark.parametrize("path", ["data/missing.jsonl", "/no/such/folder", "~nobody-here/a"])
def test_a_source_that_does_not_exist_is_named(path):
    with pytest.raises(ValueError, match=r"expected a file, a folder or a hub name, got "):
        read(path)


def test_truncated_files_and_unknown_extensions_are_named(tmp_path):
    whole = gzip.compress(json.dumps(MESSAGES).encode() * 50)
    (tmp_path / "a.jsonl.gz").write_bytes(whole[:-9])
    (tmp_path / "b.jsonl.gz").write_bytes(whole[:20] + b"\0\0\0\0\0\0" + whole[26:])
    (tmp_path / "c.csv").write_text("a,b")
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        with pytest.raises(ValueError, match=rf"expected a readable file, got .*{name}"):
            read(tmp_path / name)
    with pytest.raises(ValueError, match=r"expected a file that ends in .*, got .*c.csv"):
        read(tmp_path / "c.csv")


BAD = {
    "{": "not JSON (Expecting property name enclosed in double quotes)",
    "[" * 100_000: "not JSON that can be read (nested too deeply, or an integer of too many digits)",
    '{"text": ' + "7" * 5000 + "}": "not JSON that can be read (nested too deeply, or an integer of too many digits)",
    "[1]": "expected a record with named fields, got list",
    '{"id": 3}': "none of the keys turns, conversations, conversation, messages, prompt, instruction, question, "
    "chosen, text, but id",
    '{"conversations": "Hi"}': "conversations is not a list of turns",
    '{"messages": ["Hi"]}': "turn 1 has no named fields",
    '{"conversations": [{"from": "wizard", "value": "x"}]}': "turn 1 has an unknown from: 'wizard'",
    '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant"}]}': "the content of turn 2 is not text",
    '{"conversations": [{"from": "human", "value": " \\n"}]}': "the value of turn 1 is empty",
    '{"messages": [{"role": "assistant", "content": "x"}]}': "no user turn",
    '{"prompt": "Hi", "text": "Roses are red."}': "no answer to learn: a prompt alone",
    '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": null, "function_call": {"name": '
    '"weather", "arguments": "city=Rome"}}]}': "the arguments of a tool call in turn 2 are not a JSON object",
    '{"text": "a \\ud800 b"}': "text holds half a surrogate pair",
    '{"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]}': "the weight of turn 1 is neither 0 nor 1",
    '{"messages": [{"role": "assistant", "content": null, "tool_calls": [{}]}]}': "a tool call of turn 1 has no name",
    '{"text": "ab", "input_ids": [1, -1], "learnt": [[0, 1]]}': "input_ids is not a list of token ids",
    '{"text": "ab", "input_ids": [1, 2], "learnt": [[2, 1]]}': "learnt is not a list of spans [start, end] of "
    "input_ids in order",
    '{"text": "ab", "input_ids": [1, 2], "learnt": [[1, 6]]}': "learnt is not a list of spans [start, end] of "
    "input_ids in order",
    '{"text": "ab", "input_ids": [1, 2], "learnt": []}': "tokenizer is not text",
}


@pytest.mark.parametrize("line", BAD, ids=list(BAD.values()))
def test_a_bad_record_is_reported_with_its_line(tmp_path, line):
    path = write_lines(tmp_path / "a.jsonl", MESSAGES, line, MESSAGES)
    report = Report()
    assert len(read(path, report)) == 2
    assert report.read == 3
    assert report.examples == [(f"{path}:2", BAD[line])]
    assert dict(report.bad) == {BAD[line]: 1}


def test_bytes_that_are_not_utf8_are_reported(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "caf\xe9"}\n{"text": "fine"}\n')
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    report = Report()
    assert [record.text for record in read(tmp_path, report)] == ["fine"]
    assert report.examples == [(f"{path}:1", "not UTF-8"), (str(tmp_path / "b.txt"), "not UTF-8")]


def test_a_named_format_is_enforced(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", MESSAGES | {"text": "Once."})
    assert read(path, form="text")[0].text == "Once."
    assert read(path, form="messages")[0].messages == EXPECTED
    report = Report()
    assert read(path, report, form="sharegpt") == []
    assert dict(report.bad) == {"none of the keys conversations, conversation, but messages, text": 1}


WEATHER = {"name": "weather", "description": "The weather.", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": WEATHER}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
S, U, A = ("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello")
# Records as the data sets and programs named have them, and what they say: role and content of each turn.
FORMATS = {
    "SQuAD": ({"question": "Why?", "context": "It rains.", "id": "a1"}, [("user", "Why?\n\nIt rains.")]),
    "OpenOrca": ({"id": "t0.1", "system_prompt": "Be brief.", "question": "Hi", "response": "Hello"}, [S, U, A]),
    "a system message of its own": ({"system": "Be brief.", "messages": [{"role": "system", "content": "Be brief."},
        *MESSAGES["messages"]]}, [S, U, A]),
    "Alpaca, all in the input": ({"instruction": "", "input": "Hi", "output": "Hello"}, [U, A]),
    "SpecForge": ({"id": "1", "conversations": MESSAGES["messages"]}, [U, A]),
    "XTuner": ({"conversation": [{"system": "Be brief.", "input": "Hi", "output": "Hello"}]}, [S, U, A]),
    "ms-swift": ({"system": "Be brief.", "conversation": [{"human": "Hi", "assistant": "Hello"}]}, [S, U, A]),
    "TRL, prompt and completion": (
        {"prompt": MESSAGES["messages"][:1], "completion": MESSAGES["messages"][1:]}, [U, A]
    ),
    "TRL, preferences with a prompt": (
        {"prompt": MESSAGES["messages"][:1], "chosen": MESSAGES["messages"][1:], "rejected": []}, [U, A]
    ),
    "a prompt that is repeated without its system message": (
        {"prompt": [{"role": "system", "content": S[1]}, MESSAGES["messages"][0]], "chosen": MESSAGES["messages"]},
        [S, U, A],
    ),
    "OpenAI's developer and parts": (
        {"messages": [{"role": "developer", "content": "Be brief."},
                      {"role": "user", "content": [{"type": "input_text", "text": "H"}, "i"]},
                      {"role": "assistant", "content": "Hello", "refusal": None, "tool_calls": []}]},
        [S, U, A],
    ),
    "OpenAI's tool calls": (
        {"messages": [MESSAGES["messages"][0],
                      {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function":
                          {"name": "weather", "arguments": '{"city": "Rome"}'}}]},
                      {"role": "tool", "tool_call_id": "c1", "content": None}, MESSAGES["messages"][1]],
         "tools": [TOOL]},
        [U, ("assistant", None), ("tool", ""), A],
    ),
    "OpenAI's function calls": (
        {"messages": [MESSAGES["messages"][0],
                      {"role": "assistant", "content": None, "function_call": CALL["function"]},
                      {"role": "function", "name": "weather", "content": "Sun."}, MESSAGES["messages"][1]],
         "functions": [WEATHER]},
        [U, ("assistant", None), ("tool", "Sun."), A],
    ),
    "LLaMA-Factory's tool calls": (
        {"conversations": [{"from": "human", "value": "Hi"},
                           {"from": "function_call", "value": json.dumps(CALL["function"])},
                           {"from": "observation", "value": "Sun."}, {"from": "gpt", "value": "Hello"}],
         "tools": json.dumps([WEATHER])},
        [U, ("assistant", None), ("tool", "Sun."), A],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_all_of_a_prompt_is_read_in_every_format(tmp_path, caplog, name):
    """In training and as a prompt: nothing is left out, nor is there a note about it."""
    record, expected = FORMATS[name]
    path = write_lines(tmp_path / "a.jsonl", record)
    report = Report()
    (found,) = read(path, report, seeds=expected[-1][0] == "user")
    assert [(turn["role"], turn["content"]) for turn in found.messages] == expected
    assert not report.notes
    calls = [{key: call[key] for key in CALL} for turn in found.messages for call in turn.get("tool_calls", ())]
    (prompt,) = read_prompts([path], turns=9)
    if "tool" in dict(expected):
        assert calls == [CALL]
        assert found.tools == prompt.tools == (TOOL,)
        assert "in 1 of 1 prompts what follows the first result of a tool is not read" in caplog.text
    else:
        assert not caplog.text
    assert prompt.system == dict(expected).get("system")
    assert prompt.turns == tuple(content for role, content in expected if role == "user")


def test_text_that_is_not_read_is_counted_by_its_key(tmp_path, caplog):
    said = {"id": "a", "source": "web", "model": "m", "score": 1.5, "persona": " ", "text": "USER: Hi"}
    path = write_lines(
        tmp_path / "a.jsonl",
        MESSAGES | said,
        MESSAGES | {"persona": "a pirate", "system": None, "options": [{"b": "yes"}]},
        {"messages": MESSAGES["messages"], "persona": "x"},
        {"system": "Be brief.", "messages": [{"role": "system", "content": "Speak."}, *MESSAGES["messages"]]},
        {"text": "Once.", "context": "A tale."},
        {"prompt": "Hi", "context": "A tale.", "chosen": MESSAGES["messages"]},
        MESSAGES | {"weight": 0, "loss": 1},
        {"text": "Once.", "train": False},
        {"tools": [TOOL], "messages": [{**turn, "thinking": "Hm.", "id": "a"} for turn in MESSAGES["messages"]]},
    )
    report = Report()
    assert len(read(path, report)) == 9
    notes = {"persona": 2, "system": 1, "context": 2, "prompt": 1, "weight": 1, "train": 1, "messages[].thinking": 1}
    assert dict(report.notes) == {f"{key!r} is not read": count for key, count in notes.items()}
    assert "\n  noted: 2 x 'persona' is not read\n" in str(report)
    read_prompts([path])
    assert "in 2 of 9 prompts 'persona' is not read" in caplog.text


@pytest.mark.parametrize(("key", "off", "on"), [("weight", 0, 1), ("train", False, True), ("loss", False, None)])
def test_answers_of_weight_0_are_marked(tmp_path, key, off, on):
    turns = [{"role": "user", "content": "Hi", key: off}, {"role": "assistant", "content": "No", key: off},
             {"role": "user", "content": "And?"}, {"role": "assistant", "content": "Yes", key: on}]  # fmt: skip
    (found,) = read(write_lines(tmp_path / "a.jsonl", {"messages": turns}))
    assert [turn.get("weight") for turn in found.messages] == [None, 0, None, None]


DOCS = Path(__file__).parents[2] / "docs" / "data.md"
# Of each example line in docs/data.md: the user's turns, the last answer (None: a prompt alone), the text to learn.
SAID = {
    "prompt": (["What is a heap?"], None, None),
    "prompt, response": (["What is a heap?"], "A tree in an array.", None),
    "prompt, completion": (["What is a heap?"], "A tree in an array.", None),
    "messages": (["What is a heap?"], "A tree in an array.", None),
    "conversations": (["What is a heap?"], "A tree in an array.", None),
    "conversation": (["What is a heap?"], "A tree in an array.", None),
    "system, conversations": (["What is a heap?"], "A tree in an array.", None),
    "tools, messages": (["Is it sunny in Rome?"], "Yes, it is.", None),
    "instruction, context, response": (["Who wrote it?\n\nA book by Ada."], "Ada.", None),
    "system, history, instruction, input, output": (["Hi", "And in French?"], "Bonjour", None),
    "question_id, category, turns": (["Write a haiku.", "Now in French."], None, None),
    "task_id, prompt": (["def add(a, b):\n"], None, None),
    "question, answer": (["How many eggs are in two dozen?"], "24 #### 24", None),
    "instruction, input, output": (["Translate to French.\n\nGood day"], "Bonjour", None),
    "text": ([], None, "A heap is a tree in an array."),
    "seed, ended, cut, messages, tokenizer, learnt, input_ids": (["What is a heap?"], "A tree.", None),
    "index, prompt, response, finish, prompt_tokens, new_tokens, steps, source": (
        ["What is a heap?"], "A tree in an array.", None
    ),
}  # fmt: skip


def documented():
    """The example lines of docs/data.md, by their keys."""
    lines = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    return {", ".join(json.loads(line)): line for line in lines}


@pytest.mark.parametrize("keys", documented())
def test_every_command_reads_the_documented_lines_alike(tmp_path, keys):
    path = write_lines(tmp_path / "a.jsonl", documented()[keys])
    asked, answer, text = SAID[keys]
    (seed,) = read_records([SourceConfig(str(path))], Report(), seeds=True)
    (prompt,) = read_prompts([path], turns=9)
    assert prompt.turns == tuple(asked or [text])
    assert [turn["content"] for turn in seed.messages if turn["role"] == "user"] == asked
    assert seed.text == text
    report = Report()
    learnt = read(path, report)
    if answer is None and text is None:
        assert dict(report.bad) == {"no answer to learn: a prompt alone": 1}
        with pytest.raises(ValueError, match=r"expected answers to learn from, got 1 prompts alone; `medusa distill"):
            report.check(0.01)
    else:
        assert [record.text for record in learnt] == [text]
        assert [turn["content"] for turn in learnt[0].messages][-1:] == ([] if answer is None else [answer])


def test_a_prompt_next_to_a_text_is_its_beginning_and_an_instruction_is_not(tmp_path):
    path = write_lines(
        tmp_path / "a.jsonl",
        {"prompt": "Once", "text": "Once upon a time."},
        {"instruction": "Tell.", "input": "", "output": "Once.", "text": "### Instruction: Tell. ### Response: Once."},
    )
    assert [prompt.turns for prompt in read_prompts([path])] == [("Once",), ("Tell.",)]
    first, second = read(path)
    assert first.text == "Once upon a time."
    assert [turn["content"] for turn in second.messages] == ["Tell.", "Once."]


def test_some_prompts_without_answers_say_what_writes_them(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", MESSAGES, {"prompt": "Hi", "response": " "})
    report = Report()
    assert len(read(path, report)) == 1
    with pytest.raises(ValueError, match=r"(?s)at most 1.00% bad records, got 1 of 2 .*medusa distill --config FILE"):
        report.check(0.01)


def test_turns_without_targets_are_dropped_and_reported(tmp_path):
    turns = ["system", "gpt", "human", "assistant", "user"]
    record = {"conversations": [{"from": role, "value": role} for role in turns]}
    report = Report()
    (found,) = read(write_lines(tmp_path / "a.jsonl", record), report)
    assert [turn["content"] for turn in found.messages] == ["system", "human", "assistant"]
    assert dict(report.notes) == {
        "assistant turns before the first user turn dropped": 1,
        "turns after the last assistant turn dropped": 1,
    }


def test_a_system_message_is_added(tmp_path):
    own = {"messages": [{"role": "system", "content": "Own"}, *MESSAGES["messages"]]}
    first, second = read(write_lines(tmp_path / "a.jsonl", MESSAGES, own), system="Be brief.")
    assert first.messages == ({"role": "system", "content": "Be brief."}, *EXPECTED)
    assert second.messages == ({"role": "system", "content": "Own"}, *EXPECTED)


def test_the_limit_counts_valid_records(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", MESSAGES, "{", MESSAGES, MESSAGES)
    report = Report()
    assert [record.where for record in read(path, report, limit=2)] == [f"{path}:1", f"{path}:3"]
    assert report.read == 3


def test_too_many_bad_records_are_an_error_that_lists_them():
    report = Report(read=200)
    report.reject("a:7", "no user turn")
    report.reject("a:9", "no user turn")
    report.check(0.01)
    report.reject("b:1", "not JSON")
    with pytest.raises(ValueError, match=r"at most 1.00% bad records, got 3 of 200 records bad \(1.50%\)") as caught:
        report.check(0.01)
    lines = ["2 x no user turn", "1 x not JSON", "a:7: no user turn", "a:9: no user turn", "b:1: not JSON"]
    assert str(caught.value).splitlines()[1:] == [f"  {line}" for line in lines]
    with pytest.raises(ValueError, match="there is no record"):
        Report().check(0.5)
    for line in range(500):
        report.reject(f"a:{line}", "not JSON")
    assert len(report.examples) == 20
    assert report.bad["not JSON"] == 501


def test_a_prompt_is_never_in_both_training_and_held_out_data():
    prompts = [f"Question {i % 700}" for i in range(3000)]
    spelt = [prompt.replace(" ", "\n  ").upper() if i // 700 % 2 else prompt for i, prompt in enumerate(prompts)]
    records = [Record(({"role": "user", "content": text},), None, str(i)) for i, text in enumerate(spelt)]
    train, held = split_records(records, 0.1, seed=3)
    sides = [{" ".join(record.prompt.split()).lower() for record in side} for side in (train, held)]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 700
    # 700 prompts at 10 %: the standard deviation of the count is 7.9.
    assert abs(len(sides[1]) - 70) < 4 * math.sqrt(700 * 0.1 * 0.9)
    again = split_records(reversed(records), 0.1, seed=3)
    assert {record.where for record in again[1]} == {record.where for record in held}


def test_a_larger_held_out_share_contains_the_smaller_one_and_seeds_differ():
    prompts = [f"prompt {i}" for i in range(400)]
    small, large = ({p for p in prompts if held_out(p, share)} for share in (0.05, 0.3))
    assert small < large
    assert {p for p in prompts if held_out(p, 0.3, seed=1)} != large
    assert not any(held_out(p, 0.0) for p in prompts)
