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

ALIASES = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else 'x'}]" for n in range(12)).encode()
MERGED = (f"<<: [{', '.join([f'*a{n - 1}'] * 9)}]" if n else "x: 1" for n in range(12))
MERGES = "\n".join(f"a{n}: &a{n} {{{keys}}}" for n, keys in enumerate(MERGED))
CHAIN = "\n".join(f"a{n}: &a{n} [{f'*a{n - 1}' if n else 'x'}]" for n in range(3000)).encode()
YAML = JSON | {
    "aliases": ALIASES,
    "merges": MERGES.encode(),
    "chain": CHAIN,
    "own": b"a: &a {b: *a}",
    "keys": b"? [a, b]\n: 1",
    "mapping as key": b"? {a: b}\n: 1",
    "repeated": b"a: 1\na: 2",
    "integer": b"a: !!int x",
    "no integer": b"a: !!int ''",
    "truth": b"a: !!bool maybe",
    "no float": b"a: !!float ''",
    "month": b"a: 2001-13-41",
    "no time": b"a: !!timestamp x",
    "binary tag": b"a: !!binary '%'",
    "python": b"a: !!python/object/apply:os.system ['true']",
    "sexagesimal": b"a: " + b"1:" * 2000 + b"1",
    "pairs": b"!!omap [1, 2]",
    "blocks": b"".join(b" " * n + b"- \n" for n in range(400)),
    "dashes": b"- " * 5000,
    "anchors": b"a: &a *a",
    "documents": b"--- a\n" * 1000,
    "large": b"a: [" + b"1, " * 10**6 + b"1]",
    "values": b"a: [" + b"1, " * 20000 + b"1]",
}
