"""Conversations as token ids: a tree of turns, in which what was sampled is never tokenised again."""
