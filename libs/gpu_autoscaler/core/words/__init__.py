"""What is decided and recorded, in sentences for people. What has no sentence is an error of the type checker."""
