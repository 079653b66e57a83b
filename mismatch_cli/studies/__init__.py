"""Traces or runs in, a typed result out: what is computed, knowing nothing of pictures, terminals or flags."""
