"""Real rank processes: `launcher` starts and watches them, `process` is what runs in one, `stacks` says what became of
each, `scratch` holds their files. Every command that drives ranks, and the project's own tests, start them here."""
