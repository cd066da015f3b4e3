"""Trees of draft tokens: their shape, how they are drawn, and which tree is best for given head accuracies."""
