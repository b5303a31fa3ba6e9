"""`python -m eval.plan target=MODEL`: would a drafter of this shape pay here, before one is trained?

The costs of a round do not depend on what a drafter has learned, so they are measured with an
untrained one of the candidate's shape, in real rounds of the real decoder. What is left open is the
acceptance: the plan says how much of it breaks even, and what each amount would bring.

The payback is in minutes of plain decoding: replacing that much of it saves the minutes that writing
the text and training took, training_minutes / (1 - 1 / speedup).
"""
