"""Everything that can be set in a run's YAML or on the command line of the environment.

The key names are those that users of Atropos know. Each field's text is also its `--help`.

`dataset` has the keys of a data set and of rewards, and `run` all others. `warnings` finds values that contradict each
other.
"""
