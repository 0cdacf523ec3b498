"""What an encoder has learned: its features on a manifest, and how well they tell classes apart."""
