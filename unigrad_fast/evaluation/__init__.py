"""Evaluates an encoder: extracts its features for a manifest and measures how well they separate classes."""
