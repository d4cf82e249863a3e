"""Results that change: how their changes reach the operators above, and what may stand between."""
