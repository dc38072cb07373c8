"""How fast pgqrs is: against hand-written SQL, and against itself with more rows in the tables."""
