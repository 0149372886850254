"""Files and batches: what is kept of them, and how a batch's lines are run."""
