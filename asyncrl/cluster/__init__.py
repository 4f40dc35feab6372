"""Runs over many hosts: which command each host has, and the engines that place hosts."""
