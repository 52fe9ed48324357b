"""What the trainer minimises: a surrogate of the reward, an aggregation over tokens, corrections and penalties."""
