"""The recipe of a demo model like the one that ships with the package; run from the checkout's root."""
