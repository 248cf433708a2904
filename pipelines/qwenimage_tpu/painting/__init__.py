"""A tiny QwenImage that paints coloured shapes: its drawings, its training, its scoring and its weights.

Importing this package costs nothing; each module imports what it needs by itself.
"""
