"""Turns what clouds say about interruptible capacity into facts: notices, hints, offers and prices."""
