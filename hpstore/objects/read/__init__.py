"""Reading objects: plan, submit, verify, decode, deliver."""
