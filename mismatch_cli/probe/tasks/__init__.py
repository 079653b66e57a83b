"""Problems, prompt templates, grading and advantages."""
