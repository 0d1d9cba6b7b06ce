"""The generation state: prompts become responses, in one step or several, in one turn or several."""
