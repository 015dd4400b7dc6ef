"""Parameters that are stored in one form and computed with in another. Imports `flat` and what it imports."""
