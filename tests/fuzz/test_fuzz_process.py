"""Streams that are closed, broken or of another encoding, and an interrupt while modules are imported."""

import io
import os
import signal
import subprocess
import sys
import time

import pytest

from medusa_decoding.cli import _arguments, generate, main


class Gone(io.RawIOBase):
    """A stream whose reader has gone, or whose disk is full."""

    def __init__(self, error):
        self.error = error

    def writable(self):
        return True

    def write(self, data):
        raise self.error


@pytest.fixture
def written(monkeypatch):
    """Replace the prompt's generation by printing the prompt: the text that came in goes out again."""
    monkeypatch.setattr(generate, "generate", lambda args, text, prints: print(text))


def ascii_stream(content=b""):
    return io.TextIOWrapper(io.BytesIO(content), encoding="ascii")


@pytest.mark.slow
def test_an_interrupt_during_imports_says_so_in_one_line():
    command = [sys.executable, "-m", "medusa_decoding", "doctor"]
    # The tests themselves may be a job in the background, which ignores interrupts and whose children would do so too.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    while not torch_is_loading(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err.splitlines()[-1:]) == (130, "", ["medusa: interrupted"])
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_job_in_the_background_that_ignores_interrupts_goes_on():
    command = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); from medusa_decoding.cli import main; "
    command += "import torch; sys.argv[1:] = ['tree', '--help']; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not torch_is_loading(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, "interrupted" in err) == (0, False)
    assert out.startswith("usage: medusa tree")


def torch_is_loading(pid):
    with open(f"/proc/{pid}/maps") as maps:
        return "libtorch" in maps.read()


def test_closed_standard_input_is_an_empty_one(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", None)
    assert main(["generate"]) == 2
    assert capsys.readouterr().err == ("medusa: prompt: give some text by --prompt, --file or standard input\n")


def test_closed_output_is_no_error(monkeypatch, written):
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    assert main(["generate", "--prompt", "a"]) == 0
    assert main(["generate", "--prompt", ""]) == 2


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
        (OSError(28, "No space left on device"), 2, "medusa: [Errno 28] No space left on device\n"),
    ],
)
@pytest.mark.parametrize("argv", [["tree", "show", "chain:3"], ["generate", "--help"]])
def test_output_that_cannot_be_written_ends_the_command(monkeypatch, capfd, error, code, said, argv):
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BufferedWriter(Gone(error)), encoding="utf-8"))
    assert main(argv) == code
    assert capfd.readouterr().err == said


@pytest.mark.slow
def test_a_reader_that_has_gone_is_told_nothing():
    """At the process's end Python writes what is still buffered: that fails quietly too."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "medusa_decoding", "tree", "show", "chain:3"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    os.close(writing)
    assert done.returncode == 141
    assert "Broken" not in done.stderr


def test_text_of_any_encoding_goes_in_and_out(monkeypatch, written):
    """What is piped in is UTF-8; what the locale has no characters for is written as escapes."""
    monkeypatch.setattr("sys.stdin", ascii_stream("\u00e9\u20ac".encode()))
    monkeypatch.setattr("sys.stdout", ascii_stream())
    assert main(["generate"]) == 0
    assert sys.stdout.buffer.getvalue() == b"\\xe9\\u20ac\n"


def test_bytes_that_are_not_utf_8_are_refused(monkeypatch, capsys, tmp_path):
    expected = "expected UTF-8 text, got '\\udcff' at character 3"
    monkeypatch.setattr("sys.stdin", ascii_stream(b"abc\xff"))
    assert main(["generate"]) == 2
    assert capsys.readouterr().err == f"medusa: prompt: {expected}\n"
    (tmp_path / "prompt").write_bytes(b"abc\xff")
    assert main(["generate", "--file", str(tmp_path / "prompt")]) == 2
    assert "prompt: expected UTF-8 text, got invalid start byte at byte 3" in capsys.readouterr().err
    for option in (["generate", "--prompt"], ["generate", "--stop"], ["chat", "--system"], ["train", "--set"]):
        with pytest.raises(SystemExit) as end:
            main([*option, os.fsdecode(b"\xff\xfe")])
        assert end.value.code == 2
        assert f"argument {option[1]}: expected UTF-8 text" in capsys.readouterr().err


def test_an_argument_that_the_locale_could_not_read_is_read():
    """As Python gives it where the locale is ASCII: a lone surrogate for each byte."""
    assert _arguments.text("\u00e9".encode().decode("ascii", "surrogateescape")) == "\u00e9"
    assert _arguments.text("\u00e9") == "\u00e9"
