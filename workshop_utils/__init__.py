"""The helper package of the workshop: describe a training job once, launch it anywhere, measure it.

Start reading at `jobs` (what to run), `strategies` (how workers co-operate) and `launchers.local` (a place).
"""
