"""Environments in the forms of SkyRL-gym and gymnasium, which need neither library."""

from types import SimpleNamespace


class Guessing:
    """As SkyRL-gym's: a reward for each well-formed guess, and one more for the answer."""

    closed = 0

    def __init__(self, env_config=None, extras=None):
        self.truth = extras["reward_spec"]["ground_truth"]
        self.max_turns = int(extras.get("max_turns", 3))
        self.turns = 0

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        self.turns += 1
        reward = 1.0 if action == self.truth else 0.25 * action.isdigit()
        done = reward == 1.0 or self.turns == self.max_turns
        observations = [] if done else [{"role": "user", "content": f"not {action}"}]
        return {"observations": observations, "reward": reward, "done": done, "metadata": {}}

    def close(self):
        Guessing.closed += 1


class Rewriting(Guessing):
    """Begins with another prompt than the data's."""

    def init(self, prompt):
        return [{"role": "system", "content": "Guess."}, *prompt], {}


class Corridor:
    """As gymnasium's: a walk from place 1 to place 3, with the actions 1, back, and 2, forth."""

    metadata = {"render_modes": ["ansi"]}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode
        self.action_space = SimpleNamespace(n=2, start=1)

    def reset(self, seed=None, options=None):
        self.place, self.num_steps = 1 + seed % 2, 0
        return self.place, {}

    def step(self, action):
        self.place += 1 if action == 2 else -1
        self.num_steps += 1
        return self.place, 1.0 if self.place == 3 else -0.125, self.place == 3, self.num_steps == 4, {}

    def render(self):
        return "".join(f"\x1b[41m{place}\x1b[0m" if place == self.place else "." for place in range(4)) + "\n"

    def close(self):
        pass


class Boxed(Corridor):
    """Has actions that no text is."""

    def __init__(self, render_mode=None):
        self.action_space = "Box(3)"
