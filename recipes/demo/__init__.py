"""What trained the demo model that ships with the package; run from the checkout's root."""
