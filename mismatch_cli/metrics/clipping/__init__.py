"""What trust regions discard: accumulators over tokens that every algorithm has judged."""
