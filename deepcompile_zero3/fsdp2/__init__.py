"""The methods, states and functions that scripts know from FSDP2."""
