"""Models as the engine sees them: schedules of walks over keyed streams, and the networks behind them."""
