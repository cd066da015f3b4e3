"""Serving: an engine whose rows join and leave between steps, and the HTTP server over it.

`engine` knows token ids, and neither text nor HTTP; `http` knows both, and neither caches nor steps.
"""
