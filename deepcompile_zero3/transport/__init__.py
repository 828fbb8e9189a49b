"""How ranks reach each other: by messages, or through memory that ranks of one host share."""
