"""Measuring a converted model against its original: time, tokens per second, peak memory and error in one table."""
