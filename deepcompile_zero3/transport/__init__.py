"""How ranks reach each other: by messages, or by memory that those of one host share."""
