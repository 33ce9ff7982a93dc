package agent_test

import "net/http"

// httpClient is what Connect's clients send with.
type httpClient struct{ transport http.RoundTripper }

func (c *httpClient) Do(r *http.Request) (*http.Response, error) { return c.transport.RoundTrip(r) }
