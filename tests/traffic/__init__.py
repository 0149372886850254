"""Real requests of every dialect against `penstock serve` in processes of its own, with and without faults."""
