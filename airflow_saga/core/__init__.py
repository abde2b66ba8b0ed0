"""What a saga is: states as tables, records, the action registry, pure decisions. Standard library only, no I/O."""
