"""From a row to a scored rollout: prompt, replies, turns, scores, and the group to train on."""
