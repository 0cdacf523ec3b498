"""How images are listed: folders, text files and shards, their labels, and the cache of what was found."""
