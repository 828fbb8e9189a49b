"""Connections between ranks: messages, or memory that the ranks of one host share."""
