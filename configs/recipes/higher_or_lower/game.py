"""Higher or lower: guess the secret digit in at most four turns."""

from spmdrl.engines.environment.episode import End, Observation, Row, Turn

MOST_GUESSES = 4


class HigherOrLower:
    """The model guesses a digit, and reads after each wrong guess whether the secret is higher (+) or lower (-)."""

    def open(self, row: Row) -> "Game":
        return Game(int(row.columns["answer"]))


class Game:
    """One row's game: its secret, and the guesses so far."""

    def __init__(self, secret: int):
        self.secret, self.num_guesses = secret, 0

    def step(self, turn: Turn) -> Observation | End:
        self.num_guesses += 1
        guess = turn.response
        if guess == str(self.secret):
            return End(reward=1.25 - 0.25 * self.num_guesses)
        if len(guess) != 1 or not guess.isdigit() or self.num_guesses == MOST_GUESSES:
            return End(reward=0.0)
        return Observation("+" if int(guess) < self.secret else "-")
