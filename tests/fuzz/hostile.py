"""Contents that readers of files must refuse or read: the same ones for every kind of file."""

DEEP = 100_000
NESTED = {
    "lists": b"[" * DEEP + b"]" * DEEP,
    "open lists": b"[" * DEEP,
    "objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "objects in lists": b'[{"choices":' * DEEP,
}
NUMBERS = {
    "digits": b"9" * 5000,
    "digits in an object": b'{"choices": [[' + b"9" * 5000 + b']], "accuracies": [[' + b"9" * 5000 + b"]]}",
    "infinite": b"[[1e999]]",
    "nan": b'{"choices": [[NaN]], "accuracies": [[NaN]], "texts": NaN, "messages": NaN}',
    "large": b"[[" + b"9" * 4000 + b"]]",
}
BYTES = {
    "empty": b"",
    "white": b" \n\t ",
    "zeros": b"\0" * 64,
    "latin": "r\u00e9sum\u00e9".encode("latin-1"),
    "utf-16": '{"a": 1}'.encode("utf-16"),
    "half a character": b'"\xe2\x82',
    "surrogate": b'{"text": "\\ud800", "prompt": "\\ud800", "messages": [{"role": "user", "content": "\\udfff"}]}',
    "binary": bytes(range(256)),
    "mark": b"\xef\xbb\xbf[]",
    "long line": b'{"prompt": "' + b"a" * 2**22 + b'"}',
    "many": b"[" + b"[0]," * 2**17 + b"[0]]",
}
SHAPES = {
    f"shape {number}": content
    for number, content in enumerate(
        [b"null", b"true", b"5", b'"text"', b"[]", b"{}", b"[[]]", b"[null]", b"[[null]]", b'{"a": null}', b"[{}]",
         b'{"choices": null}', b'{"choices": {"a": 1}}', b'{"choices": [[0]], "keep": []}', b'{"messages": [[]]}',
         b'{"messages": [{"role": [], "content": {}}]}', b'{"accuracies": [[2]]}', b'{"accuracy": {"hits": [[1]]}}',
         b'{"turns": [[]]}', b'{"prompt": {}}', b'{"conversations": [{"from": 1, "value": 2}]}', b'{"texts": [5]}',
         b'{"step_times": 5}', b'{"format": 1, "paths": {"a": "b"}, "made": 5}', b'{"hits": 1, "total": 0}']
    )
}  # fmt: skip
JSON = NESTED | NUMBERS | BYTES | SHAPES
