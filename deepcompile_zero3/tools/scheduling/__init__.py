"""Schedules that are chosen from measured steps."""
