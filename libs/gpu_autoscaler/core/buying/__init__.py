"""What is bought, and what is not: offers, their cost, the basket of one plan.

Used by the steps of `plan` that buy.
"""
