"""Commands on image sets (draw, preview, scan, shard), and the image lists that a run reads."""
