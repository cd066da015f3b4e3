"""The HTTP server: OpenAI's chat and text completions over the engine, metrics, and a page to try it.

`app.create_app` makes the FastAPI application; the modules below it are in the order of a request: `guard` (host, key,
body), `protocol` (what a request may say), `plan` (what the engine is asked), `answers` (what it has written so far)
and `events` (what the client receives).
"""
