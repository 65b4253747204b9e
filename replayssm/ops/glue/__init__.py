"""What surrounds a recurrence in a layer, one kernel each: norms, short convolutions, gates."""
