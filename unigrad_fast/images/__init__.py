"""What commands do with image sets: draw, preview, scan and shard them, and the lists that a run reads."""
