"""From a configuration to a job: resolve, check, plan, build and resume."""
