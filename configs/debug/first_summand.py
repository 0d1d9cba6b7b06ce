"""A reward that can be read off the prompt, whatever the response is: for runs that train a critic."""


def first_summand(prompts, completions, **columns):
    """The first number of prompts such as `12+34=`, divided by 50."""
    return [int(prompt.partition("+")[0]) / 50 for prompt in prompts]
