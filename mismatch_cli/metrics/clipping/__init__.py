"""What trust regions throw away: accumulators over tokens that every algorithm has judged."""
