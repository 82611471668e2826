"""What a loss computes of a row of logits."""
